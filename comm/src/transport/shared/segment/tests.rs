use std::fs::File;
use std::os::fd::AsRawFd;

use super::*;

#[test]
fn one_process_reads_what_another_wrote() {
    let created = Segment::create(3).unwrap();
    let opened = Segment::open(std::process::id(), created.fd(), 3).unwrap();
    assert_eq!((opened.local_size(), opened.fd()), (3, -1));
    created.u32_at(4096).store(7, Ordering::Release);
    assert_eq!(opened.u32_at(4096).load(Ordering::Acquire), 7);
    // The creator may go first.
    drop(created);
    assert_eq!(opened.u32_at(4096).load(Ordering::Acquire), 7);
}

#[test]
fn another_number_of_ranks_is_refused() {
    let created = Segment::create(2).unwrap();
    let message = Segment::open(std::process::id(), created.fd(), 3)
        .unwrap_err()
        .to_string();
    assert!(
        message.contains("expected") && message.contains("for 3 ranks"),
        "{message}"
    );
}

#[test]
fn another_version_is_refused() {
    let created = Segment::create(2).unwrap();
    created.u64_at(MAGIC_AT).store(MAGIC + 1, Ordering::Release);
    let message = Segment::open(std::process::id(), created.fd(), 2)
        .unwrap_err()
        .to_string();
    assert!(message.contains("another version"), "{message}");
}

#[test]
fn a_process_that_does_not_exist_is_refused_with_help() {
    let message = Segment::open(u32::MAX, 5, 2).unwrap_err().to_string();
    assert!(
        message.contains("/fd/5") && message.contains("PID namespace"),
        "{message}"
    );
}

#[test]
fn another_file_is_refused() {
    let other = File::open("/dev/null").unwrap();
    assert!(Segment::open(std::process::id(), other.as_raw_fd(), 2).is_err());
}

#[test]
fn the_file_cannot_shrink() {
    let created = Segment::create(1).unwrap();
    // SAFETY: a descriptor that `created` keeps open, and a number.
    let shrunk = unsafe { libc::ftruncate(created.fd(), 0) };
    assert_eq!(shrunk, -1);
}

#[test]
fn a_segment_takes_only_the_memory_that_is_touched() {
    let created = Segment::create(8).unwrap();
    let file = File::from(created.mapping.file.as_ref().unwrap().try_clone().unwrap());
    let blocks = std::os::unix::fs::MetadataExt::blocks(&file.metadata().unwrap());
    assert!(blocks * 512 <= 16 << 10, "{blocks} blocks of 512 bytes");
}
