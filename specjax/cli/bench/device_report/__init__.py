"""`specjax bench --device-report`: one report of kernels, speed and memory on a device.

`stages` lists what is measured, one module each; `running` runs the cases, keeps the document
after each, and goes on where an earlier run ended; `page` makes a page of the document.
"""
