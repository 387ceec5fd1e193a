from toolhost.base.goondan_base.redaction import *
