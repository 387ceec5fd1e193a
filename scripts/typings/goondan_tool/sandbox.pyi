from goondan.toolhost.inside.sandbox import *
