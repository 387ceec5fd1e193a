"""Who waits for whom (`gdn ps --why`)."""
