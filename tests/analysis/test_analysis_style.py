from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from megatron_ext.analysis.style import png


def test_a_dollar_in_a_name_is_no_formula():
    """Dollar signs in a domain of a title and in an architecture of a legend are not parsed as formulas."""
    figure = Figure(figsize=(2, 2), dpi=40)
    FigureCanvasAgg(figure)
    ax = figure.add_subplot()
    ax.plot([1, 2], label="a$b{c$")
    ax.set_title("d$e{f$ (out of domain)", loc="left")
    figure.legend()
    assert png(figure).startswith(b"\x89PNG")
