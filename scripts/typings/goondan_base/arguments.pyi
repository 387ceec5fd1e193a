from toolhost.base.goondan_base.arguments import *
