from toolhost.base.code.code_scripts.printed import *
