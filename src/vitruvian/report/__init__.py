"""Pages for people: the HTML kit, its one stylesheet, one palette and color map, and one chart."""
