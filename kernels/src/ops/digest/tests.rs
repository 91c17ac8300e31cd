use super::*;
use crate::Device;
use crate::ops::testing::SIZES;

fn digests(x: &[f32]) -> Vec<i64> {
    let chunks = ChunkTable::whole(x.len()).without_decay();
    let x = Tensor::from_slice(x, &[x.len()], Device::Cpu).unwrap();
    let out = Tensor::zeros(&[DIGEST * chunks.quanta()], DType::I64, Device::Cpu).unwrap();
    digest_quanta(&out, &x, &chunks).unwrap();
    out.to_vec().unwrap()
}

#[test]
fn a_digest_has_the_sum_and_the_squares_of_whole_numbers_of_every_count() {
    for count in SIZES.into_iter().filter(|&count| count < 100_000) {
        let x: Vec<f32> = (0..count).map(|i| (i % 7) as f32 - 2.0).collect();
        for (quantum, digest) in x.chunks(QUANTUM).zip(digests(&x).chunks(DIGEST)) {
            let of = |index: usize| f64::from_bits(digest[index].cast_unsigned());
            let wide = || quantum.iter().map(|&x| f64::from(x));
            assert_eq!(of(1), wide().sum::<f64>(), "{count}");
            assert_eq!(of(2), wide().map(|x| x * x).sum::<f64>(), "{count}");
        }
    }
}

#[test]
fn every_changed_bit_and_every_swap_changes_the_hash() {
    let x: Vec<f32> = (0..1500).map(|i| (i as f32).sin()).collect();
    let hash = |x: &[f32]| digests(x).into_iter().step_by(DIGEST).collect::<Vec<_>>();
    let before = hash(&x);
    for index in [0, 1, 31, 32, 1023, 1024, 1499] {
        for bit in 0..32 {
            let mut other = x.clone();
            other[index] = f32::from_bits(other[index].to_bits() ^ 1 << bit);
            assert_ne!(hash(&other), before, "bit {bit} of element {index}");
        }
    }
    let mut swapped = x.clone();
    swapped.swap(3, 900);
    assert_ne!(hash(&swapped), before);
    let mut signed = vec![0.0; 40];
    signed[7] = -0.0;
    assert_ne!(hash(&signed), hash(&[0.0; 40]));
}

#[test]
fn a_part_of_whole_quanta_has_the_digests_that_it_has_in_the_whole() {
    let x: Vec<f32> = (0..5000).map(|i| (i as f32).cos()).collect();
    let all = digests(&x);
    assert_eq!(
        digests(&x[2 * QUANTUM..4 * QUANTUM]),
        all[2 * DIGEST..4 * DIGEST]
    );
}

#[test]
fn wrong_calls_say_what_is_wrong() {
    let x = Tensor::zeros(&[2000], DType::F32, Device::Cpu).unwrap();
    let chunks = ChunkTable::whole(2000).without_decay();
    let out = |count, dtype| Tensor::zeros(&[count], dtype, Device::Cpu).unwrap();
    for (out, named) in [
        (out(5, DType::I64), "three numbers for each quantum"),
        (out(6, DType::F64), "i64"),
    ] {
        let error = digest_quanta(&out, &x, &chunks).unwrap_err().to_string();
        assert!(
            error.contains("digest_quanta") && error.contains(named),
            "{error}"
        );
    }
    let short = Tensor::zeros(&[1999], DType::F32, Device::Cpu).unwrap();
    let error = digest_quanta(&out(6, DType::I64), &short, &chunks).unwrap_err();
    assert!(
        error.to_string().contains("at least 2000 elements"),
        "{error}"
    );
}
