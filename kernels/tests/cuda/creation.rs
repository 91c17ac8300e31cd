//! Constructors make the same bits on a device as on the CPU, without a transfer; and transposed
//! views are made contiguous there.

use ddp_kernels::transfer::forbid_transfers;
use ddp_kernels::{DType, Device, Random, Tensor};

use crate::tiles::{around, constant};
use crate::{SIZES, assert_same_bits, devices, next_device};

const FLOATS: [DType; 3] = [DType::F32, DType::BF16, DType::F64];

#[test]
fn constants_are_made_where_they_are_wanted() {
    for device in devices() {
        for (size, dtype) in SIZES
            .into_iter()
            .flat_map(|size| DType::ALL.map(|dtype| (size, dtype)))
        {
            let [zeros, ones, full] = forbid_transfers(|| {
                [
                    Tensor::zeros(&[size], dtype, device).unwrap(),
                    Tensor::ones(&[size], dtype, device).unwrap(),
                    Tensor::full(&[size], 97.0, dtype, device).unwrap(),
                ]
            });
            let what = format!("{dtype}[{size}]");
            assert_same_bits(
                &zeros,
                &Tensor::zeros(&[size], dtype, Device::Cpu).unwrap(),
                &what,
            );
            assert_same_bits(
                &ones,
                &Tensor::ones(&[size], dtype, Device::Cpu).unwrap(),
                &what,
            );
            assert_same_bits(
                &full,
                &Tensor::full(&[size], 97.0, dtype, Device::Cpu).unwrap(),
                &what,
            );
        }
        assert!(
            Tensor::full(&[1], 300.0, DType::U8, device)
                .unwrap_err()
                .to_string()
                .contains("full: value")
        );
    }
}

#[test]
fn memory_used_before_is_zero_again() {
    for device in devices() {
        for round in 0..3 {
            let zeros = Tensor::zeros(&[4099], DType::F32, device).unwrap();
            assert_same_bits(
                &zeros,
                &Tensor::zeros(&[4099], DType::F32, Device::Cpu).unwrap(),
                &format!("{round}"),
            );
            drop(zeros);
            drop(Tensor::ones(&[4099], DType::F32, device).unwrap());
        }
    }
}

#[test]
fn counting_gives_what_the_dtype_holds() {
    for device in devices() {
        for (dtype, count) in DType::ALL
            .into_iter()
            .flat_map(|dtype| [0, 1, 256, 70_001].map(|count| (dtype, count)))
        {
            if dtype == DType::U8 && count > 256 {
                continue;
            }
            // f16 and bf16 round, and f16 ends at 65,504.
            let got = forbid_transfers(|| Tensor::arange(count, dtype, device).unwrap());
            let expected = Tensor::arange(count, dtype, Device::Cpu).unwrap();
            assert_same_bits(&got, &expected, &format!("arange {dtype}[{count}]"));
        }
    }
}

#[test]
fn random_numbers_have_the_same_bits_as_on_the_cpu() {
    const SEED: u64 = 0xfedc_ba98_7654_3210;
    for device in devices() {
        for (size, dtype) in SIZES
            .into_iter()
            .flat_map(|size| FLOATS.map(|dtype| (size, dtype)))
        {
            // A late draw, so that both of its words count.
            let (mut here, mut there) = (
                Random::at(SEED, (5 << 32) + 7),
                Random::at(SEED, (5 << 32) + 7),
            );
            for draw in 0..2 {
                let what = format!("draw {draw} {dtype}[{size}]");
                let (uniform, normal) = forbid_transfers(|| {
                    let uniform = Tensor::rand(&[size], dtype, device, &mut there).unwrap();
                    (
                        uniform,
                        Tensor::randn(&[size], dtype, device, &mut there).unwrap(),
                    )
                });
                let expected = Tensor::rand(&[size], dtype, Device::Cpu, &mut here).unwrap();
                assert_same_bits(&uniform, &expected, &format!("rand {what}"));
                let expected = Tensor::randn(&[size], dtype, Device::Cpu, &mut here).unwrap();
                assert_same_bits(&normal, &expected, &format!("randn {what}"));
            }
            assert_eq!(here.position(), there.position());
        }
        for (size, dtype) in SIZES
            .into_iter()
            .flat_map(|size| [DType::U8, DType::I32, DType::I64].map(|d| (size, d)))
        {
            let (mut here, mut there) = (Random::new(SEED), Random::new(SEED));
            let bounds = [1, 10, 256, 1 << 31, u32::MAX];
            for bound in bounds.into_iter().filter(|&bound| match dtype {
                DType::U8 => bound <= 256,
                DType::I32 => bound <= 1 << 31,
                _ => true,
            }) {
                let got = forbid_transfers(|| {
                    Tensor::randint(bound, &[size], dtype, device, &mut there).unwrap()
                });
                let expected =
                    Tensor::randint(bound, &[size], dtype, Device::Cpu, &mut here).unwrap();
                assert_same_bits(&got, &expected, &format!("randint {bound} {dtype}[{size}]"));
            }
        }
    }
}

#[test]
fn what_fails_uses_up_no_random_numbers() {
    for device in devices() {
        let mut random = Random::new(3);
        assert!(Tensor::rand(&[1], DType::I32, device, &mut random).is_err());
        assert!(Tensor::randint(0, &[1], DType::I32, device, &mut random).is_err());
        assert!(Tensor::randn(&[1 << 50], DType::F32, device, &mut random).is_err());
        assert_eq!(random.position(), (3, 0));
    }
}

#[test]
fn a_transposed_view_is_written_out_on_the_device() {
    let tile = constant!("transpose.cu", TILE);
    let mut shapes = vec![(0, 3), (1, 37), (37, 1), (100, 257)];
    shapes.extend(around(tile).map(|rows| (rows, tile + 1)));
    shapes.extend(around(tile).map(|columns| (tile, columns)));
    // More tiles than a grid has blocks: with one dtype.
    const LONG: usize = 70_001;
    shapes.extend([(2, LONG), (LONG, 2)]);
    for (rows, columns) in shapes {
        let of_all = rows.max(columns) < LONG;
        for dtype in DType::ALL
            .into_iter()
            .filter(|&x| of_all || x == DType::BF16)
        {
            // 0 to 126, which every dtype holds.
            let numbers: Vec<u8> = (0..rows * columns)
                .map(|index| (index % 127) as u8)
                .collect();
            let x = Tensor::from_slice(&numbers, &[columns * rows], Device::Cpu)
                .unwrap()
                .to_dtype(dtype)
                .unwrap();
            let expected = x
                .reshape(&[columns, rows])
                .unwrap()
                .t()
                .unwrap()
                .contiguous()
                .unwrap();
            let Some(device) = next_device() else { return };
            // From the second element of a buffer on.
            let buffer = Tensor::zeros(&[rows * columns + 1], dtype, device).unwrap();
            let part = buffer.slice(1..rows * columns + 1).unwrap();
            part.copy_from(&x.to(device).unwrap()).unwrap();
            let view = part.reshape(&[columns, rows]).unwrap().t().unwrap();
            let got = forbid_transfers(|| view.contiguous().unwrap());
            assert!(!got.is_transposed() && got.device() == device);
            assert_same_bits(
                &got,
                &expected,
                &format!("transpose {dtype} [{rows}, {columns}]"),
            );
            assert_same_bits(&view, &expected, "a transposed view read by the host");
        }
    }
}
