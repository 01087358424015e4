"""How bytes move between workers: the protocol (``base``), a fake that ships (``memory``), and NIXL (``nixl``,
over the typed ``nixl_agent``).
"""
