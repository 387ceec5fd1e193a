from toolhost.base.goondan_base.reasons import *
