from goondan.toolhost.base.goondan_base.fetch import *
