// SGD without momentum on one element: see update.rs.
{
    let decay = select(of.decays, of.scalars[1], number(0.0));
    value = value - of.scalars[0] * fused(decay, value, grad);
}
