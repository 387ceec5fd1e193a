from goondan.toolhost.inside.processes import *
