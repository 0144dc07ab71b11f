"""What people see: tables on the terminal, self-contained HTML pages, traces for Perfetto."""
