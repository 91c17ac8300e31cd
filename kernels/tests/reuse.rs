//! Buffers are reused. In a separate file, because the statistics are of the whole process.

use ddp_kernels::{DType, Device, Tensor, memory};

#[test]
fn making_and_dropping_the_same_sizes_reuses_their_memory() {
    let make = || Tensor::zeros(&[300_000], DType::F32, Device::Cpu).unwrap();
    drop((make(), make()));
    let before = memory::stats(Device::Cpu).system_allocation_count;
    for _ in 0..10 {
        let (first, second) = (make(), make());
        assert!(!first.shares_memory_with(&second));
        first.with_slice_mut::<f32, _>(|x| x.fill(7.0)).unwrap();
    }
    assert_eq!(memory::stats(Device::Cpu).system_allocation_count, before);
    assert_eq!(
        make().to_vec::<f32>().unwrap(),
        vec![0.0; 300_000],
        "a reused buffer is zeroed again"
    );
}
