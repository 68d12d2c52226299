"""Keep a data set in sync with a folder whose files change.

scan (which files exist)  ->  records (what is known about them)  ->  compute features of new images, in a new pass
->  publish a new version of the data set
"""
