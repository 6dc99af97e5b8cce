"""Proxies that take pods' traffic where policy asks for it: of layer 7, that of DNS."""
