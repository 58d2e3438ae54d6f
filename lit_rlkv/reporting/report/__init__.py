"""report.html: one self-contained page that says what a run gained, and how to read its pictures."""

from lit_rlkv.reporting.report.content import Picture, RunReport, headline
from lit_rlkv.reporting.report.page import render, write_report
from lit_rlkv.reporting.report.pictures import figures

__all__ = ["Picture", "RunReport", "figures", "headline", "render", "write_report"]
