from goondan.toolhost.base.goondan_base.shell import *
