"""Static plans of what travels when. No devices."""

from .buckets import assign_buckets as assign_buckets
