from toolhost.base.goondan_base.saving import *
