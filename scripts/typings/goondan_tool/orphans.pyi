from goondan.toolhost.inside.orphans import *
