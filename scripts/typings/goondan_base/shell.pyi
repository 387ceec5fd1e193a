from toolhost.base.goondan_base.shell import *
