"""What will a step cost, before anything is rented: scenarios, forecasts, sweeps."""
