//! This process: its age and its memory. `None` where the system does not report them, as outside
//! of Linux.

use std::fs;

use ddp_kernels::{Device, memory};

/// Seconds since this process was started, loading the program included.
pub fn age_s() -> Option<f64> {
    let stat = fs::read_to_string("/proc/self/stat").ok()?;
    let uptime = fs::read_to_string("/proc/uptime").ok()?;
    age_of(&stat, &uptime)
}

/// The most memory this process has had at a time, in MB.
pub fn peak_mb() -> Option<f64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    peak_of(&status)
}

/// The most memory of `device` that this process has had, in MB: tensors, and memory kept for
/// reuse. None on the CPU, whose memory is the process's.
pub fn device_peak_mb(device: Device) -> Option<f64> {
    let is_apart = device.is_accelerator();
    is_apart.then(|| memory::stats(device).reserved_bytes_peak as f64 / 1e6)
}

/// The most that one of these devices has had.
pub(crate) fn devices_peak_mb(devices: &[Device]) -> Option<f64> {
    let peaks = devices.iter().filter_map(|device| device_peak_mb(*device));
    peaks.reduce(f64::max)
}

/// The unit of start times in /proc, on every machine.
const TICKS_PER_S: f64 = 100.0;

fn age_of(stat: &str, uptime: &str) -> Option<f64> {
    // The second field, the name, is in brackets and may hold anything. The start is field 22.
    let (_, after_name) = stat.rsplit_once(')')?;
    let started: f64 = after_name.split_ascii_whitespace().nth(19)?.parse().ok()?;
    let now: f64 = uptime.split_ascii_whitespace().next()?.parse().ok()?;
    Some((now - started / TICKS_PER_S).max(0.0))
}

fn peak_of(status: &str) -> Option<f64> {
    let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
    let kib: f64 = line.split_ascii_whitespace().nth(1)?.parse().ok()?;
    Some(kib * 1024.0 / 1e6)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_has_an_age_whatever_its_name() {
        let stat = "17 (a) 1 (b) S 1 17 17 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 1250 5 6 7";
        assert_eq!(age_of(stat, "20.75 31.00\n"), Some(8.25));
        assert_eq!(age_of("nonsense", "1 2"), None);
    }

    #[test]
    fn the_peak_is_that_of_the_kernel() {
        assert_eq!(
            peak_of("Name:\tx\nVmHWM:\t    1000 kB\nVmRSS:\t 5 kB\n"),
            Some(1.024)
        );
        assert_eq!(peak_of("Name:\tx\n"), None);
    }

    #[test]
    fn this_process_is_young_and_not_empty() {
        let (Some(age_s), Some(peak_mb)) = (age_s(), peak_mb()) else {
            return;
        };
        assert!((0.0..3600.0).contains(&age_s), "{age_s}");
        assert!(peak_mb > 1.0, "{peak_mb}");
    }
}
