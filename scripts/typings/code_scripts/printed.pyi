from goondan.toolhost.base.code.code_scripts.printed import *
