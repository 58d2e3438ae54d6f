"""report.html: one self-contained page with the results and figures of a run."""

from lit_rlkv.reporting.report.content import Picture, RunReport, headline
from lit_rlkv.reporting.report.page import render, write_report
from lit_rlkv.reporting.report.pictures import figures

__all__ = ["Picture", "RunReport", "figures", "headline", "render", "write_report"]
