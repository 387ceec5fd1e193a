from goondan.toolhost.base.code.code_scripts.node_script import *
