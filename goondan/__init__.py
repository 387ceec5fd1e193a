"""The one name under which all of this is installed and imported.

In the repository, its packages are links to the folders at the top. A wheel has the folders themselves in their place.
"""
