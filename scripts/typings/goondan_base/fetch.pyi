from toolhost.base.goondan_base.fetch import *
