from goondan.toolhost.base.goondan_base.reasons import *
