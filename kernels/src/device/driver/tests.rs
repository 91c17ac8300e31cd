//! The driver's answers, from functions that replace it.

use super::*;

fn environment(visible_devices: Option<&str>) -> SearchEnvironment {
    let variable = |name: &str| {
        (name == "CUDA_VISIBLE_DEVICES")
            .then(|| visible_devices.map(OsString::from))
            .flatten()
    };
    SearchEnvironment::reading(variable, Path::new("/nowhere"), Vec::new())
}

unsafe extern "C" fn accepts(_flags: c_uint) -> c_int {
    0
}

unsafe extern "C" fn version_13_1(version: *mut c_int) -> c_int {
    // SAFETY: the code under test passes one int.
    unsafe { *version = 13010 };
    0
}

unsafe extern "C" fn two(count: *mut c_int) -> c_int {
    // SAFETY: the code under test passes one int.
    unsafe { *count = 2 };
    0
}

unsafe extern "C" fn same(device: *mut c_int, index: c_int) -> c_int {
    // SAFETY: the code under test passes one int.
    unsafe { *device = index };
    0
}

unsafe extern "C" fn refuses(_device: *mut c_int, _index: c_int) -> c_int {
    101
}

/// Fills the whole buffer, without the zero that the driver promises.
unsafe extern "C" fn endless_name(name: *mut c_char, size: c_int, _device: c_int) -> c_int {
    // SAFETY: the code under test passes a buffer of that size.
    unsafe { std::ptr::write_bytes(name, b'x', size as usize) };
    0
}

unsafe extern "C" fn byte_times_device(uuid: *mut [u8; 16], device: c_int) -> c_int {
    // SAFETY: the code under test passes 16 bytes.
    unsafe {
        *uuid = std::array::from_fn(|position| (0x11 * device as u8).wrapping_add(position as u8))
    };
    0
}

unsafe extern "C" fn refuses_memory(_bytes: *mut usize, _device: c_int) -> c_int {
    101
}

unsafe extern "C" fn refuses_attribute(_: *mut c_int, _: c_int, _: c_int) -> c_int {
    101
}

/// Two GPUs, of which it tells no name, memory or capability.
const TERSE: DiscoveryFunctions = DiscoveryFunctions {
    cuInit: accepts,
    cuDriverGetVersion: version_13_1,
    cuDeviceGetCount: two,
    cuDeviceGet: same,
    cuDeviceGetName: endless_name,
    cuDeviceTotalMem_v2: refuses_memory,
    cuDeviceGetAttribute: refuses_attribute,
    cuDeviceGetUuid_v2: byte_times_device,
};

#[test]
fn gpus_are_listed_even_if_the_driver_lacks_functions() {
    assert_eq!(TERSE.version(), Some((13, 1)));
    let gpus = TERSE.gpus(&environment(None)).unwrap();
    let second = FoundGpu {
        index: 1,
        name: "GPU of unknown name".to_string(),
        memory_bytes: 0,
        compute_capability: (0, 0),
        uuid: "GPU-11121314-1516-1718-191a-1b1c1d1e1f20".to_string(),
    };
    assert_eq!((gpus.len(), &gpus[1]), (2, &second));
}

#[test]
fn gpus_that_cannot_be_opened_are_explained() {
    let listing = DiscoveryFunctions {
        cuDeviceGet: refuses,
        ..TERSE
    };
    let why = listing.gpus(&environment(None)).unwrap_err();
    assert!(
        why.contains("101") && why.contains("INVALID_DEVICE"),
        "{why}"
    );
}

#[test]
fn the_drivers_refusals_come_in_words() {
    for (code, word) in [
        (3, "initialise"),
        (34, "stubs"),
        (304, "/dev/nvidia"),
        (802, "fabricmanager"),
        (803, "Reboot"),
        (804, "compat"),
        (999, "nvidia_uvm"),
        (12345, "12345"),
    ] {
        let why = refusal("cuInit", code, &environment(None));
        assert!(
            why.contains(word) && why.contains(&code.to_string()),
            "{why}"
        );
    }
    for (visible, word) in [
        (None, "--gpus all"),
        (Some(""), "set and empty"),
        (Some(" "), "set and empty"),
        (Some("-1"), "\"-1\""),
    ] {
        let why = refusal("cuInit", 100, &environment(visible));
        assert!(why.contains(word), "{visible:?}: {why}");
    }
}

#[test]
fn a_missing_file_is_told_from_a_library_that_misses_another() {
    let absent = "libcuda.so.1: cannot open shared object file: No such file or directory";
    let needs = "libnvidia-x.so: cannot open shared object file: No such file or directory";
    assert!(is_absence(absent, "libcuda.so.1") && !is_absence(needs, "libcuda.so.1"));
    assert!(is_absence(
        "Error loading shared library libcuda.so.1: No such file or directory",
        "libcuda.so.1"
    ));
    assert!(!is_absence(
        "/x/libcuda.so.1: invalid ELF header",
        "libcuda.so.1"
    ));
}

#[test]
fn a_slice_of_a_gpu_is_named_as_one() {
    assert_eq!(
        uuid_text("NVIDIA H200 MIG 1g.18gb", [0xab; 16]),
        "MIG-abababab-abab-abab-abab-abababababab"
    );
}
