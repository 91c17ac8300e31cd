//! False claims of a header allocate nothing. Alone in its process, so that allocations of the pool
//! can be counted.

use ddp_kernels::{DType, Device, Tensor, memory, npy};

/// `VmHWM`: the most memory that this process has ever had.
fn peak_bytes() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status
        .lines()
        .find(|line| line.starts_with("VmHWM:"))
        .unwrap();
    line.split_whitespace()
        .nth(1)
        .unwrap()
        .parse::<usize>()
        .unwrap()
        * 1024
}

fn file(version: u8, header: &str, elements: &[u8]) -> Vec<u8> {
    let length = u32::try_from(header.len()).unwrap().to_le_bytes();
    let length = if version == 1 {
        &length[..2]
    } else {
        &length[..]
    };
    [
        b"\x93NUMPY",
        &[version, 0][..],
        length,
        header.as_bytes(),
        elements,
    ]
    .concat()
}

#[test]
fn wrong_headers_allocate_nothing() {
    let mut lies = vec![
        b"\x93NUMPY\x02\x00\xff\xff\xff\xff{".to_vec(),
        b"\x93NUMPY\x03\x00\xff\xff\x00\x00{".to_vec(),
    ];
    for shape in [
        "(1000, 1000)",
        "(1073741824,)",
        "(1000000000000,)",
        "(1152921504606846975,)",
        "(9223372036854775807,)",
        "(18446744073709551615,)",
        "(4294967296, 4294967296, 4294967296)",
        "(0, 18446744073709551615, 18446744073709551615)",
        "(-1,)",
        "(1, 1, 1, 1, 1, 1, 1, 1, 1000000000)",
    ] {
        for order in ["True", "False"] {
            let header =
                format!("{{'descr': '<f8', 'fortran_order': {order}, 'shape': {shape}, }}\n");
            lies.extend([1, 2, 3].map(|version| file(version, &header, &[0; 12])));
        }
    }
    for bracket in ["(", "[", "{", "'"] {
        lies.push(file(1, &bracket.repeat(60_000), &[]));
        lies.push(file(
            1,
            &format!("{{'descr': {}", bracket.repeat(60_000)),
            &[],
        ));
        lies.push(file(
            1,
            &format!("{{'shape': ({}", "1,".repeat(30_000)),
            &[],
        ));
    }
    let path = std::env::temp_dir().join(format!("ddp-npy-lies-{}.npy", std::process::id()));
    // Once before counting, so that what the test itself needs is there.
    let check_all = || {
        for lie in &lies {
            std::fs::write(&path, lie).unwrap();
            for result in [
                npy::parse(lie, Device::Cpu),
                Tensor::load_npy(&path, Device::Cpu),
            ] {
                let error = result.unwrap_err().to_string();
                assert!(
                    error.len() < 500 && error.contains("not a usable .npy file"),
                    "{error}"
                );
            }
        }
    };
    check_all();
    let (before, peak_before) = (memory::stats(Device::Cpu), peak_bytes());
    for _ in 0..10 {
        check_all();
    }
    std::fs::remove_file(&path).unwrap();
    assert_eq!(
        memory::stats(Device::Cpu).allocation_count,
        before.allocation_count
    );
    assert!(
        peak_bytes() - peak_before < 8 << 20,
        "{peak_before} bytes before, {} after",
        peak_bytes()
    );
    assert_eq!(before.allocation_count, 0);
    // The counter does count.
    let _one = Tensor::zeros(&[1], DType::F32, Device::Cpu).unwrap();
    assert_eq!(memory::stats(Device::Cpu).allocation_count, 1);
}
