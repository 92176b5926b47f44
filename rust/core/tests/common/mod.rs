//! A simulated device and a driver around the scheduler, for tests of what the scheduler asks of a device.
#![allow(dead_code, unreachable_pub)] // each test binary uses a part

pub mod device;
pub mod driver;
pub mod model;
