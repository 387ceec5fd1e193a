from goondan.toolhost.base.code.code_scripts.python_script import *
