"""`puna sample`: real web pages, Wikipedia extracts and code out of pinned packages, as WARC files."""

from puna.stages.sample.build import SampleFile, SampleReport, announcement, build_sample
from puna.stages.sample.packages import PACKAGES, Package

__all__ = ["PACKAGES", "Package", "SampleFile", "SampleReport", "announcement", "build_sample"]
