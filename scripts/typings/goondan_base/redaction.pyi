from goondan.toolhost.base.goondan_base.redaction import *
