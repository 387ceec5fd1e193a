from toolhost.inside.sandbox import *
