"""The demo's sample: real web pages, Wikipedia extracts and code from pinned packages, as WARC files."""

from puna.flows.demo.build import SampleFile, SampleReport, build_sample
from puna.flows.demo.packages import PACKAGES, Package

__all__ = ["PACKAGES", "Package", "SampleFile", "SampleReport", "build_sample"]
