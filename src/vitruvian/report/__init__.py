"""HTML reports: Jinja templates with one stylesheet, charts and colors."""
