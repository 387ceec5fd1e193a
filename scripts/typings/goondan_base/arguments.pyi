from goondan.toolhost.base.goondan_base.arguments import *
