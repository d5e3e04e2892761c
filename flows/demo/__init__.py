"""`puna sample`: real web pages, Wikipedia extracts and code out of pinned packages, as WARC files."""

from puna.flows.demo.build import SampleFile, SampleReport, announcement, build_sample
from puna.flows.demo.packages import PACKAGES, Package

__all__ = ["PACKAGES", "Package", "SampleFile", "SampleReport", "announcement", "build_sample"]
