from goondan.features.code_mode.jail.code.code_scripts.node_script import *
