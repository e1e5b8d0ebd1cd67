"""The cluster in a browser: a page that the directory serves, live while somebody looks. See README.md."""
