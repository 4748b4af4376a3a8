"""Pages that are files: `kgorch report` and `kgorch compare` as HTML and Markdown.

What is drawn where is decided in `chart`, as plain numbers; the templates only write them down, and escape every text. All
figures come from report/.
"""
