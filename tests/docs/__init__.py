"""The pages of docs/ and the README: what they tell people to type is typed, where they point to exists.

pages               a page -> its blocks of code, its links
session             one process that runs a page's Python, block after block
test_pages          every block of every page runs, in order, in a clean folder
test_links          every link and anchor leads somewhere
test_tables         pages that are made from the code are what the code says
test_site           the site is built, and loads nothing from elsewhere
test_troubleshooting    every message that a page names is one of the code's
"""
