from goondan.toolhost.base.code.code_scripts.calls import *
