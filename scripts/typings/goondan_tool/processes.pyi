from toolhost.inside.processes import *
