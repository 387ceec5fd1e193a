from goondan.features.code_mode.jail.code.code_scripts.python_script import *
