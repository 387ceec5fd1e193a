from goondan.toolhost.base.goondan_base.saving import *
