"""Three studies, the paper's, that of deep networks and that of PINNs. Not part of the installed package."""
