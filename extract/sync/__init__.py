"""Features kept in step with a folder that people change all day.

scan (what files there are)  ->  manifest (what is known of them)  ->  what is new is computed, in a pass of its own
->  a new version of the data set is published
"""
