from toolhost.inside.orphans import *
