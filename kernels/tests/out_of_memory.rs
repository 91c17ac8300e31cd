//! Running out of memory is an error that says what to do, before anything is changed. In a
//! separate file, because the limit holds for the whole process.

use ddp_kernels::{DType, Device, Error, Tensor, memory};

const MIB: usize = 1 << 20;

#[test]
fn the_error_names_device_bytes_free_and_the_largest_tensors_and_keeps_what_is_alive() {
    let device = Device::Cpu;
    let made_at = line!() + 1;
    let largest = Tensor::ones(&[40 * MIB], DType::U8, device).unwrap();
    let largest = largest.named("activations");
    let smaller = Tensor::ones(&[10 * MIB], DType::U8, device).unwrap();
    memory::set_limit_bytes(device, Some(64 * MIB));

    let error = Tensor::zeros(&[5, 4 * MIB], DType::F32, device).unwrap_err();
    let Error::OutOfMemory(details) = &error else {
        panic!("{error:?}")
    };
    assert_eq!(
        (details.asked_bytes, details.free_bytes, details.limit_bytes),
        (80 * MIB, 14 * MIB, 64 * MIB)
    );
    assert_eq!(
        details.largest[0].tensor.name.as_deref(),
        Some("activations")
    );
    let text = error.to_string();
    for part in [
        "out of memory on cpu (host memory): f32[5, 4194304] on cpu asks for 80.0 MiB",
        "free 14.0 MiB of 64.0 MiB",
        "40.0 MiB \"activations\" u8[41943040] on cpu made at kernels/tests/out_of_memory.rs",
        &format!(":{made_at}"),
        "help: use a smaller model or batch",
    ] {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
    assert_eq!(
        largest.slice(0..1).unwrap().item().unwrap() + smaller.slice(0..1).unwrap().item().unwrap(),
        2.0
    );

    // Memory that is only kept for reuse makes room.
    drop(largest);
    let fits = Tensor::zeros(&[50 * MIB], DType::U8, device).unwrap();
    drop((fits, smaller));
    memory::set_limit_bytes(device, None);

    // Without a limit of ours it is the machine's: far more than any has is refused before it is
    // mapped.
    let text = Tensor::zeros(&[1 << 47], DType::U8, device)
        .unwrap_err()
        .to_string();
    assert!(text.contains("asks for 128.0 TiB"), "{text}");
    assert!(Tensor::zeros(&[usize::MAX / 8, 2], DType::F32, device).is_err());
}
